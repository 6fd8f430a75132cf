"""One file per role: plain classes, usable under Ray, torchrun and pytest alike."""
