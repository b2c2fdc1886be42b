"""Whether a request's Accept header asks for server-sent events. Pure."""

EVENT_STREAM = "text/event-stream"
_JSON = "application/json"


def wants_event_stream(accept: str) -> bool:
    """True where events are named in `accept` and preferred to JSON; between equals the first named wins.

    A wildcard asks for nothing: without an explicit `text/event-stream` the answer is plain JSON.
    """
    best = ("", 0.0)
    for part in accept.lower().split(","):
        media_type, _, parameters = part.partition(";")
        quality = _quality(parameters)
        if media_type.strip() in (EVENT_STREAM, _JSON) and quality > best[1]:
            best = (media_type.strip(), quality)
    return best[0] == EVENT_STREAM


def _quality(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
