"""Reads a command line: --flag, --name=value, --name value, and positional arguments; -- ends the options."""


class UsageError(ValueError):
    pass


def parse(arguments, valued=(), flags=()):
    """Return (options, positional)."""
    options = {}
    positional = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            positional += rest
            break
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            if name in flags:
                if equals:
                    raise UsageError(f"--{name} takes no value")
                options[name] = True
            elif name in valued:
                if not equals:
                    if not rest:
                        raise UsageError(f"--{name} needs a value")
                    value = rest.pop(0)
                options[name] = value
            else:
                raise UsageError(f"unknown option --{name}")
        else:
            positional.append(argument)
    return options, positional
