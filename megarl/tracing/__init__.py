"""What a run's processes do and when: the timeline, profilers, and who waits for whom when a run stalls."""

from megarl.tracing.collectives import watch_collectives
from megarl.tracing.options import ProfileOptions, RoleProfile, TracingOptions
from megarl.tracing.start import unwatch_process, watch_process
from megarl.tracing.tracer import PHASE, TRACER, Event, counter, past_span, span

__all__ = [
    "PHASE",
    "TRACER",
    "Event",
    "ProfileOptions",
    "RoleProfile",
    "TracingOptions",
    "counter",
    "past_span",
    "span",
    "unwatch_process",
    "watch_collectives",
    "watch_process",
]
