"""SGLang behind the engine contract.

``engine`` is the engine; ``in_process`` and ``http`` reach SGLang through the interface in ``backend``; ``serve``
starts a server, and ``liveness`` detects one that hangs. ``options`` has its arguments and environment, ``memory`` its
share of a GPU. ``weights`` passes the commands of a weight sync on to ``loader``, which runs inside SGLang's ranks and
maps their parameters with ``shards``.
"""
