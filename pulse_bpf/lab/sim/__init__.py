"""A testbed in a computer's memory: machines, network and job down to single messages, and what Pulse sees.

Nothing in here knows the analysis. model.py holds the terms; fabric.py the network; nccl.py how the library
moves data; workloads/ what jobs do; faults.py and scenarios.py what breaks; engine.c lets time pass;
collect.py tells what the collectors would have seen of it.
"""
