"""Clusters: routes and places in a topology, and the files and measurements that give one."""
