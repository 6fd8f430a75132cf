"""Jobs from their command line: a single run, or the runs of a sweep, each in its own folder."""
