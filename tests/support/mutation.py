"""Changes to encoded streams, drawn by hypothesis, for tests of decoders."""

import hypothesis.strategies as st


def mutate(stream, data, most):
    """Make up to `most` changes to a bytearray: of a bit or byte, or of the length.

    data: of `st.data()`.
    """
    for _ in range(data.draw(st.integers(1, most))):
        at = data.draw(st.integers(0, len(stream) - 1)) if stream else 0
        what = data.draw(st.sampled_from(["flip", "flip", "set", "cut", "insert", "drop"]))
        if what == "insert" or not stream:
            stream.insert(at, data.draw(st.integers(0, 255)))
        elif what == "flip":
            stream[at] ^= 1 << data.draw(st.integers(0, 7))
        elif what == "set":
            stream[at] = data.draw(st.sampled_from([0, 1, 255]))
        elif what == "cut":
            del stream[at:]
        else:
            del stream[at]
