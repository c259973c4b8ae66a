"""What `Hierarchical` must give each rank, in plain torch and LocalGroups of the inner method."""

import torch

import gradzip


class Reference:
    """What each rank must get: node means in rank order, in plain torch, and their chunks averaged over the nodes.

    The chunks of each place are averaged by a LocalGroup of the inner method, one worker for each node. Gradients have
    at least as many rows as a node has ranks.
    """

    def __init__(self, inner, nodes, places):
        self.nodes, self.places = nodes, places
        self.groups = [gradzip.LocalGroup(inner, nodes) for _ in range(places)]

    def average(self, grads, name):
        shape, dtype = grads[0].shape, grads[0].dtype
        each = -(-shape[0] // self.places)
        chunks = []  # of each node
        for node in range(self.nodes):
            first, *others = (grads[node * self.places + place].float() for place in range(self.places))
            for grad in others:
                first = first + grad
            padded = torch.zeros(self.places * each, *shape[1:])
            padded[: shape[0]] = first / self.places
            chunks.append(padded.split(each))
        averages = [group.average([of_node[i] for of_node in chunks], name)[0] for i, group in enumerate(self.groups)]
        return torch.cat(averages)[: shape[0]].to(dtype)

    @property
    def bytes_sent(self):
        return max(group.bytes_sent for group in self.groups)
