"""Scenarios for test_replicas.py, on three ranks: replicas that are made to differ, and the errors of each rank."""

import torch

import gradzip
from harness import main, message, scenario


def flip(tensor, bit):
    """Flip a bit of the first element."""
    first = tensor.detach().view(-1)[:1].view(torch.uint8)
    first[bit // 8] ^= 1 << bit % 8


@scenario
def flips(rank):
    """A monitor's errors for many kinds of tensors, after flips of single bits on the last rank."""
    torch.manual_seed(0)
    tensors = {
        "scalar": torch.tensor(1.5),
        "nan": torch.full((5,), float("nan")),
        "transposed": torch.randn(4, 6).t(),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "half": torch.randn(7).half(),
        "double": torch.randn(7).double(),
        "count": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
    }
    monitor = gradzip.ReplicaMonitor(tensors.items())
    errors = {"": message(monitor.check)}
    for name in ("scalar", "nan", "double", "count"):
        if rank == 2:
            flip(tensors[name], 0)
        errors[name] = message(monitor.check)
        monitor.broadcast()
        errors[f"{name}, repaired"] = message(monitor.check)
    if rank == 2:
        tensors["transposed"][5, 3] += 1
        tensors["channels_last"] = tensors["channels_last"].contiguous()  # the same numbers in another memory layout
        monitor.parameters = tensors
    errors["transposed"] = message(monitor.check)
    monitor.broadcast()
    errors["repaired"] = message(monitor.check)
    return errors, tensors


@scenario
def trained(rank):
    """Errors of monitors of the parameters, and of all tensors: with equal replicas, with buffers that differ, and with
    a flipped bit in a momentum, before and after the next step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    momenta = [(f"momentum {i}", s["momentum_buffer"]) for i, s in enumerate(optimizer.state.values())]
    of_parameters = gradzip.ReplicaMonitor(model.named_parameters())
    errors = [
        message(monitor.check)
        for monitor in (of_parameters, gradzip.ReplicaMonitor([*model.state_dict().items(), *momenta]))
    ]
    model(torch.randn(8, 6) * (1 + rank) + rank)
    errors += [
        message(monitor.check) for monitor in (of_parameters, gradzip.ReplicaMonitor(model.state_dict().items()))
    ]
    if rank == 1:
        flip(momenta[0][1], 22)
    errors += [message(monitor.check) for monitor in (of_parameters, gradzip.ReplicaMonitor(momenta))]
    optimizer.step()
    return [*errors, message(of_parameters.check)]


@scenario
def steps(rank):
    """Errors of monitors that check and repair in some steps, and a weight that differed on all ranks but 0."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5).bfloat16(), torch.nn.Linear(0, 0))
    monitor = gradzip.ReplicaMonitor(model.named_parameters(), check_every=3)
    messages = [message(monitor.step) for _ in range(3)]
    with torch.no_grad():
        model[1].weight[2, 3] += rank
    messages += [message(monitor.step) for _ in range(3)]
    repairing = gradzip.ReplicaMonitor(model.named_parameters(), check_every=2, broadcast_every=2)
    messages += [message(repairing.step) for _ in range(2)]
    return messages, model[1].weight.detach()


if __name__ == "__main__":
    main()
