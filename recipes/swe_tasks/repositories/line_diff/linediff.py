"""The difference of two lists of lines by their longest common subsequence."""


def lengths(old, new):
    """table[i][j]: length of the longest common subsequence of old[i:] and new[j:]."""
    table = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i in reversed(range(len(old))):
        for j in reversed(range(len(new))):
            if old[i] == new[j]:
                table[i][j] = table[i + 1][j + 1] + 1
            else:
                table[i][j] = max(table[i + 1][j], table[i][j + 1])
    return table


def diff(old, new):
    """Pairs (" " kept, "-" removed or "+" added, line)."""
    table = lengths(old, new)
    result = []
    i = j = 0
    while i < len(old) and j < len(new):
        if old[i] == new[j]:
            result.append((" ", old[i]))
            i, j = i + 1, j + 1
        elif table[i + 1][j] >= table[i][j + 1]:
            result.append(("-", old[i]))
            i += 1
        else:
            result.append(("+", new[j]))
            j += 1
    result += [("-", line) for line in old[i:]]
    result += [("+", line) for line in new[j:]]
    return result


def apply(difference):
    """The new lines."""
    return [line for mark, line in difference if mark != "-"]
