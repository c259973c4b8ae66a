"""How gradients are averaged by a method, the same for all front ends."""
