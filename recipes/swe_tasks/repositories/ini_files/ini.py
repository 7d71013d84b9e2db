"""Reads and writes settings: [section] and name = value; ; and # start a comment line."""


def read(text):
    """Settings by section; those above the first section belong to the section ""."""
    result = {"": {}}
    section = result[""]
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line[0] in ";#":
            continue
        if line.startswith("[") and line.endswith("]"):
            section = result.setdefault(line[1:-1].strip(), {})
        elif "=" in line:
            name, _, value = line.partition("=")
            section[name.strip()] = value.strip()
        else:
            raise ValueError(f"line {number}: expected name = value")
    if not result[""]:
        del result[""]
    return result


def write(settings):
    lines = []
    for name in sorted(settings):
        if name:
            lines.append(f"[{name}]")
        lines += [f"{key} = {value}" for key, value in sorted(settings[name].items())]
    return "\n".join(lines)
