"""Tools around a run: plan, doctor, launch, report, timeline and dry run; the core imports none of them."""
