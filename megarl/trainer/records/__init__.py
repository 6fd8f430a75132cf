"""Records of a run: metrics, samples, reports, the timeline, profiles, the watchdog, and the recorders of a step."""
