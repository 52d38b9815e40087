/**
  * Holds blocks of numbers and constantly replaces some of them, like a busy server. Each block is a function of the
  * seed, its index and the number of its replacements, so every number can be checked.
 *
  * <p>Arguments: seed, number of 16 KiB blocks. Prints "ready", then answers each input line until end of input.
 */
public final class Churn {
    private static final int WORDS = 2048;
    /** Milliseconds between rounds, each of which replaces 1/PART of the blocks: 1 % per second. */
    private static final int PAUSE = 50;
    private static final int PART = 2000;

    private final long seed;
    private final long[][] blocks;
    private final long[] ages;
    private long state;

    private Churn(long seed, int count) {
        this.seed = seed;
        this.state = seed;
        this.blocks = new long[count][];
        this.ages = new long[count];
        for (int at = 0; at < count; at++) {
            replace(at);
        }
    }

    /** splitmix64's output function. */
    private static long mix(long z) {
        z = (z ^ (z >>> 30)) * 0xbf58476d1ce4e5b9L;
        z = (z ^ (z >>> 27)) * 0x94d049bb133111ebL;
        return z ^ (z >>> 31);
    }

    private long first(int at) {
        return mix(mix(mix(seed) + at) + ages[at]);
    }

    private void replace(int at) {
        ages[at]++;
        long[] block = new long[WORDS];
        long first = first(at);
        for (int word = 0; word < WORDS; word++) {
            block[word] = mix(first + word);
        }
        blocks[at] = block;
    }

    private synchronized void round() {
        for (int turn = 0; turn < Math.max(1, blocks.length / PART); turn++) {
            state += 0x9e3779b97f4a7c15L;
            replace((int) Long.remainderUnsigned(mix(state), blocks.length));
        }
    }

    private synchronized int damaged() {
        int damaged = 0;
        for (int at = 0; at < blocks.length; at++) {
            long first = first(at);
            for (int word = 0; word < WORDS; word++) {
                if (blocks[at][word] != mix(first + word)) {
                    damaged++;
                    break;
                }
            }
        }
        return damaged;
    }

    public static void main(String[] arguments) throws Exception {
        Churn churn = new Churn(Long.parseLong(arguments[0]), Integer.parseInt(arguments[1]));
        Thread thread = new Thread(() -> {
            while (true) {
                churn.round();
                try {
                    Thread.sleep(PAUSE);
                } catch (InterruptedException end) {
                    return;
                }
            }
        });
        thread.setDaemon(true);
        thread.start();
        System.out.println("ready");
        var input = new java.io.BufferedReader(new java.io.InputStreamReader(System.in));
        while (input.readLine() != null) {
            System.out.println(churn.blocks.length + " blocks, " + churn.damaged() + " damaged");
        }
    }
}
