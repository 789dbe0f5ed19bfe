"""How jobs and their tokens travel: the ports in `ports`, Redis behind them."""
