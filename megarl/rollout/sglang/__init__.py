"""SGLang behind the engine contract: ``engine`` is the engine, ``in_process`` and ``http`` are the ways to reach it.

``weights``, ``placement`` and ``senders`` bring weights to its ranks, inside which ``loader`` runs; ``translation`` has
its words for requests and answers, ``options``, ``server_args`` and ``environment`` what it is started with.
"""
