"""SGLang behind the engine contract.

``engine`` is the engine; ``in_process`` and ``http`` reach SGLang through the interface in ``backend``, which also
detects an SGLang that hangs. ``options`` has its arguments and environment. ``weights`` passes the commands of a weight
sync on to :mod:`megarl.sharding.sglang_loader`, which runs inside SGLang's ranks.
"""
