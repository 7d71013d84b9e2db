"""Comma separated values, one record per line."""


def parse_line(line, separator=","):
    fields = []
    field = []
    quoted = False
    index = 0
    while index < len(line):
        character = line[index]
        if quoted:
            if character == '"' and line[index + 1 : index + 2] == '"':
                field.append('"')
                index += 1
            elif character == '"':
                quoted = False
            else:
                field.append(character)
        elif character == '"':
            quoted = True
        elif character == separator:
            fields.append("".join(field))
            field = []
        else:
            field.append(character)
        index += 1
    if quoted:
        raise ValueError("a quoted field is not closed")
    return [*fields, "".join(field)]


def read_records(text):
    """One dictionary per line behind the header."""
    lines = [line for line in text.splitlines() if line]
    header = parse_line(lines[0])
    return [dict(zip(header, parse_line(line), strict=True)) for line in lines[1:]]
