"""Weight sync: the reshard plan, and both ends of the transports that execute it.

``placement``, ``plan``, ``transfers`` and ``schedule`` need no torch. Tensors are moved in ``sender``, ``receiver`` and
``transports``.
"""
