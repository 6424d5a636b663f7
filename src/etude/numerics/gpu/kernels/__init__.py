"""The programs that run on the device, in Triton's own language: products, attention, and what works on rows."""
