"""``megarl launch``: start a Ray cluster, run a job on it, and shut it down; see docs/how_to/launch.md.

An *agent* (:mod:`megarl.ops.launch.agent`) runs on every node, started by ssh, by srun or as a child process. Launcher
and agent exchange JSON lines over the agent's standard input and output. The agent starts ``ray start --block`` and
other commands. It ends all of them on a shutdown request, at the end of its input, or after a heartbeat timeout. The
launcher (:mod:`megarl.ops.launch.session`) starts processes only through agents, so no process outlives them.
"""
