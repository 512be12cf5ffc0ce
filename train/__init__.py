"""The training program: data, steps, loop, figures."""
