"""What methods make of real gradients: captured, compressed layer by layer, and shown."""

from .gradients import capture as capture
