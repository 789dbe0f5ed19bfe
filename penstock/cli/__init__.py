"""The command `penstock`: starts the processes of a service, and speaks with a running one."""

from penstock.rooms import reach_rooms

reach_rooms()  # before its modules are imported: they print as `shared.printable` has it
