import cProfile,pstats,sys
sys.argv=['x','--shape','qwen3-0.6b','--requests','256','--longest','400']
from tests.bench import engine_throughput as e
orig=e.run
def run(built,args,num_requests):
    if num_requests<=8: return orig(built,args,num_requests)
    p=cProfile.Profile(); p.enable(); r=orig(built,args,num_requests); p.disable()
    pstats.Stats(p).sort_stats('tottime').print_stats(28)
    return r
e.run=run
e.main()
