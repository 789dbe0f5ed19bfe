"""`penstock doctor`: what is wrong with this machine, its settings, its Redis and its model, before
anything is started. Nothing is changed but a file that is written and removed again."""
