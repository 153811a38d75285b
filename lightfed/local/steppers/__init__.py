"""The steppers of plain SGD and of any optimiser of torch."""
