"""Gradients of two well-known models as matrices n x m for low-rank methods: grad.reshape(shape[0], -1)."""


def resnet50() -> list[tuple[int, int]]:
    """53 convolutions and the classifier: 25.5 M parameters."""
    shapes = [(64, 3 * 7 * 7)]
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, inside), (width, width * 9), (4 * width, width)]
            if block == 0:
                shapes.append((4 * width, inside))
            inside = 4 * width
    return [*shapes, (1000, 2048)]


def bert_base() -> list[tuple[int, int]]:
    """Embeddings, 12 layers of six matrices, and the pooler: 109 M parameters."""
    hidden = 768
    layer = [(hidden, hidden)] * 4 + [(4 * hidden, hidden), (hidden, 4 * hidden)]
    return [(30522, hidden), (512, hidden), (2, hidden), *(layer * 12), (hidden, hidden)]
