"""Workers: one file per role. Plain classes, usable under Ray, torchrun and pytest."""
