"""How jobs and their tokens travel: the ports in `base`, Redis behind them."""
