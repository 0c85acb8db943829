"""A simulated accelerator, and tests of castwise on a device that is not the CPU."""
