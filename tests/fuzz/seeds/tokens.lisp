;; Attention over tokens, an optimizer of its own, groups by path.
(import "nn" "optim" "loss")

(defknob width 16 "width" :min 2)
(defknob heads 2)
(defknob context 8)

(defdata corpus
  (text "c.txt" :tokens bytes)
  :split ((train 9/10) (valid 1/10)))

(defoptimizer plain (param grad &key (rate 0.1) (momentum 0.9))
  :state ((m zeros))
  (let ((m (+ (* momentum m) grad)))
    (list (- param (* rate m)) m)))

(deflayer causal (x)
  (destructuring-bind (b t d) (shape x)
    (let* ((split (lambda (u) (transpose (reshape u [b t heads (/ d heads)]) [0 2 1 3])))
           (q (split (linear x d :bias false :name "query")))
           (k (split (linear x d :bias false :name "key")))
           (v (split (linear x d :bias false :name "value"))))
      (linear (reshape (transpose (attend q k v :causal true) [0 2 1 3]) [b t d]) d :name "out"))))

(deflayer block (x)
  (let ((x (+ x (causal (layer-norm x)))))
    (+ x (linear (gelu (linear x (* 2 (dim x -1)) :name "up")) (dim x -1) :name "down"))))

(deflayer gpt (tokens)
  (let* ((table (param "token" [256 width] :init (normal :std 0.02)))
         (count (state "seen" [] :init zeros))
         (x (embed table tokens)))
    (set-state! "seen" (+ count 1))
    (dotimes (i 2) (setq x (block x)))
    (matmul (layer-norm x) (transpose table))))

(defun lm-loss (tokens targets)
  (cross-entropy (gpt tokens) targets))

(defrun pretrain
  :data (windows corpus :split train :context context :batch 4)
  :loss lm-loss
  :optimizer (by-path ("**/bias" (plain :rate 0.01)) (else (adamw :lr 1e-3)))
  :accumulate 2
  :ema 0.9
  :steps 10)

(defeval valid
  :data (windows corpus :split valid :context context :batch 2 :limit 3)
  :every 5
  :weights ema
  :metrics ((loss lm-loss)))
