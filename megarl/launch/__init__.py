"""One command that starts a Ray cluster, runs a job on it, and takes down what it started; see docs/launch.md.

An *agent* (:mod:`megarl.launch.agent`) runs on every node, started by ssh, srun or as a child. It is spoken to over its
standard input and output, starts ``ray start --block`` and whatever else is asked of it, and ends all of that when it
is told to, when its input closes, or when it hears nothing any more. The launcher
(:mod:`megarl.launch.attempt`) tells the agents what to do; nothing is started behind their backs, so nothing outlives
them.
"""
