"""A simulated accelerator, and what castwise promises on a device that is not the CPU."""
