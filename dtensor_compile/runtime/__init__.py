"""What happens around a compiled graph when it runs, and just before it does for the first time.

What happens in each call for each DTensor that goes in or comes out is in C++ (`native`): a Python function per
parameter is what DTensors cost under torch.
"""
