"""Payloads of single gradients, for codecs of vectors and of lists of tensors alike."""


def encode(codec, grad, key):
    """The payload of one gradient."""
    return codec.encode_all([grad], key)


def decode(codec, payloads, shape):
    """The average of payloads of one gradient of this shape. On a CPU, the next call reuses its memory."""
    (average,) = codec.decode(payloads, [shape])
    return average
