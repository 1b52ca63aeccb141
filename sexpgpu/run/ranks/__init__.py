"""One run on several devices and machines.

    supervisor (a process a node, no torch) --starts--> ranks (a process a device, the collectives between them)

Supervisors report to that of node 0, whose `judge` decides when the run has failed. Data parallel: each rank computes its
part of the batch, and what a step needs of the whole batch is summed (`collectives`).
"""
