"""From logits to tokens: penalties, filters, grammar masks, draws."""
