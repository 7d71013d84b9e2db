"""JSON pointers (RFC 6901): paths into nested dictionaries and lists."""


def split(pointer):
    if pointer == "":
        return []
    if not pointer.startswith("/"):
        raise ValueError(f"a pointer starts with a slash: {pointer!r}")
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer[1:].split("/")]


def step(value, part):
    if isinstance(value, list):
        if not part.isdigit() or int(part) >= len(value):
            raise LookupError(part)
        return value[int(part)]
    if not isinstance(value, dict) or part not in value:
        raise LookupError(part)
    return value[part]


def get(document, pointer):
    value = document
    for part in split(pointer):
        value = step(value, part)
    return value


def put(document, pointer, new):
    """Replace or add a value in place."""
    *parents, last = split(pointer)
    value = document
    for part in parents:
        value = step(value, part)
    if isinstance(value, list):
        value[int(last) :] = [new, *value[int(last) + 1 :]]
    else:
        value[last] = new
