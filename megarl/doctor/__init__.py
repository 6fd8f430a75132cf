"""Looks into what a run has left behind and says what is wrong with it."""
