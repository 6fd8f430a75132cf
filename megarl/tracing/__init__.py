"""Observation of a run's processes: timeline, profilers, and stall diagnosis (which rank waits for which)."""

from megarl.tracing.collectives import watch_collectives
from megarl.tracing.profilers import ProfileOptions, RoleProfile
from megarl.tracing.stacks import TracingOptions, unwatch_process, watch_process
from megarl.tracing.tracer import PHASE, TRACER, Event, counter, lane_span, past_span, span

__all__ = [
    "PHASE",
    "TRACER",
    "Event",
    "ProfileOptions",
    "RoleProfile",
    "TracingOptions",
    "counter",
    "lane_span",
    "past_span",
    "span",
    "unwatch_process",
    "watch_collectives",
    "watch_process",
]
