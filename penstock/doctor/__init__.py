"""`penstock doctor`: faults of this machine, its settings, its Redis and its model, before
anything is started. Nothing is changed but a file that is written and removed again."""
