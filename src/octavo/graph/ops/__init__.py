"""The operations, each defined once: arguments, shape rule, cost, cut among ranks and numpy definition."""
