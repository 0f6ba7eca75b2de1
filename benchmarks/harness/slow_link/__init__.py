"""Two hosts on one machine, with a slow link between them.

two_hosts              the hosts, made of Linux namespaces
slow_wire              the wire between them, with a rate and a delay
slow_link_steps        the training program that runs on both hosts
"""
