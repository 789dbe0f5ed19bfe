"""The command `penstock`: starts the processes of a service, and speaks with a running one."""
