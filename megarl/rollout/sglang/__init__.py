"""SGLang behind the engine contract.

``engine`` is the engine; ``in_process`` and ``http`` reach SGLang through the interface in ``backend``; ``options`` has
its arguments and environment. ``weights`` leads a weight update: ``shards`` maps slices to SGLang's ranks, ``senders``
and ``whole_tensors`` send them, and ``loader`` runs inside the ranks.
"""
