"""Typed schema: one dataclass per section, with the default, documentation and limits of every key.

``jobs`` holds the top-level class of each job and imports the others; checks over several sections are in
:mod:`megarl.config.checks`.
"""
