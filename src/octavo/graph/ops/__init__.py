"""The operations, each defined once: arguments, shape rule, cost, division among ranks, and numpy definition."""
