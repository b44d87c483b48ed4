"""What happens at a call: check, route, plan, dispatch; threads, scratch, kernels by spec."""
