"""Hands the engine's trace on: the W3C headers of the span that records now, for the metadata of a call.

OpenTelemetry is never imported here. A span can only be recording where the engine has imported it already.
"""

from __future__ import annotations

import sys

Headers = tuple[tuple[str, str], ...]


def trace_headers() -> Headers:
    """``traceparent`` and, if there is one, ``tracestate``; none without a trace."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return ()
    span = api.get_current_span()
    if not span.is_recording():
        return ()
    context = span.get_span_context()
    flags = int(context.trace_flags)
    headers: Headers = (("traceparent", f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"),)
    state = context.trace_state.to_header()
    return (*headers, ("tracestate", state)) if state else headers
