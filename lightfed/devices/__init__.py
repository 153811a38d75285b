"""Virtual time: devices, delays, availability, what the server waits for, the clocks."""
