"""What files of results say of themselves."""


def strings(value, keys):
    """All strings, alone or in lists, that a decoded JSON document has under some keys, wherever these are."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in keys and isinstance(item, (str, list)):
                yield from [item] if isinstance(item, str) else item
            else:
                yield from strings(item, keys)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item, keys)
