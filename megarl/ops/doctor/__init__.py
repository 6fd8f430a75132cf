"""Diagnosis: checks of machines before a run, and causes of log-prob differences in saved rollouts."""
