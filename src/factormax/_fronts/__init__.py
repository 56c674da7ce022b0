"""Fronts: each handles one array library and its automatic differentiation."""
